"""What a store keeps of stages that have not ended: their states, and how they failed. Never part of a result."""
