"""The storage CLI: one small file per verb."""
