"""What the tests of several packages share: fixtures, properties, ranks of a process group. It is in no wheel."""
