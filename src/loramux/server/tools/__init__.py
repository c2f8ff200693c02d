"""Function calling in chats: what a request may ask, and the calls in a model's text.

``use`` decides how a request's tools are used; ``parser`` finds calls in an answer as it comes,
reading it by ``hermes``, ``llama3``, ``mistral`` or ``forced``; ``guides`` has what makes a model
keep to schemas.
"""
