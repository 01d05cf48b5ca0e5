"""``narrowcast bench``: layers and whole models of this library beside bf16 and other packages, on this machine."""
