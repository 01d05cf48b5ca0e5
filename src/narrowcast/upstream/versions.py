"""The releases that narrowcast is tested with; build files and pages read these lines, so this imports nothing."""

OLDEST_TORCH = "2.11.0"
NEWEST_TORCH = "2.15.0"
