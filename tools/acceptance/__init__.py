"""What a person with an Ascend machine runs: every test, every tile and the published sizes on the chip, in one report."""
