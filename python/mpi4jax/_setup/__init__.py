"""The native module that fits the MPI library, and the choice of the transport."""
