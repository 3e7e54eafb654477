"""Records to operating points, intervals and an audit: pure."""
