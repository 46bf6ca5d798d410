"""Programs that measure the figures in the README; see docs/reference/benchmark_programs.md."""
