"""What a store keeps of stages that have ended: their commits, and what their files hold."""
