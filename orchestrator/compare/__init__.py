"""Operating points, intervals and an audit, computed from records: pure."""
