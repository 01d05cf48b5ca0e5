"""Version of the package; read by the build backend, so it imports nothing."""

__version__ = "0.3.0.dev0"
