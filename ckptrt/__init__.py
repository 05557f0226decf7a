"""ckptrt."""
