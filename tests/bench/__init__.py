"""Is it as fast as it should be, and still right? `make bench`; see `tests.bench.run`."""
