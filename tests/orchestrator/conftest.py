"""Shared by the tests of the orchestrator; being here, it also lets them `import factories` from any folder below."""
