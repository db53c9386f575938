"""The report of a search: one page that anyone can read, its pictures, the same as JSON, and the plan."""

from layerskip.search.report.writing import read_report, write_report

__all__ = ["read_report", "write_report"]
