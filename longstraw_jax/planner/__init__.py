"""What a step takes on devices that are not at hand: bytes by XLA's own GPU compiler, work by the programs' jaxprs."""
