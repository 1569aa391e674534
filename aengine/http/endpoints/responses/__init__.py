"""The endpoints of `/v1/responses`: one makes a response, the others read those that are kept."""
