"""What all programs share. No file here imports another room."""
