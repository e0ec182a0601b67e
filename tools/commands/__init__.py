"""The programs that `tlt` starts."""
