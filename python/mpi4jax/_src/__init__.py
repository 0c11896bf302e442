"""Names that programs import from the private module of earlier packages of this name."""
