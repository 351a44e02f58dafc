"""Collection of node status: requests to nodes, merged figures, findings and history."""
