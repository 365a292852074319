"""Story grammars and the small engine that writes the bundled corpus."""
