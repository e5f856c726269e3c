"""Evaluation of a served tiny K3 on held-out cases, through the gateway and with real tools."""
