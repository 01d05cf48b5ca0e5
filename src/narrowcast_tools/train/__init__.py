"""The demo trainer behind the `narrowcast` command; needs the `train` extra."""
