"""`python -m specinfer_jax.cli`."""

from specinfer_jax.cli import main

main()
