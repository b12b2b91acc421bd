"""Models of the zoo that no library has."""
