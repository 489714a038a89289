"""Code shared by all programs. Nothing here imports another subpackage of tools."""
