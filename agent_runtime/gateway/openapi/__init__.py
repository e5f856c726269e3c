"""The gateway's interface as an OpenAPI document."""
