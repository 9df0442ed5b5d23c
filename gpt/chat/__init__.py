"""Records become pairs and conversations; chat templates render conversations.

Knows no model.
"""
