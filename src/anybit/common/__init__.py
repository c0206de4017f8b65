"""What every room may use: atomic files, strict reading, progress, where a number comes from."""
