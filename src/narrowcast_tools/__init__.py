"""The command line ``narrowcast``, its trainer, planner and bench; they use the library."""
