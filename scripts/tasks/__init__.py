"""Short tasks whose answers a program can check: their wordings, and the maker of the bundled instruction set."""
