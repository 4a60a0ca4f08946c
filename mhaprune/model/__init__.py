"""Models and their heads: loading, finding, gating, and the machine they run on."""
