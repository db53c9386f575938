"""layerskip.search: jobs that find the draft plan that pays on a given model, device and kind of text."""
