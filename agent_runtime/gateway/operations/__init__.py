"""Running the gateway: metrics, structured logs, an orderly end"""
