"""Private inference of canonical graphs on SecretFlow SPU."""
