"""The demo trainer after the `narrowcast` command; needs the `train` extra."""
