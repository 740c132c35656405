"""Every message between the processes of a run, one file per edge: who sends it, who answers, when it is acknowledged.

    controller_site.py      controller <-> a site's generation service
    site_instance.py        a site's service <-> its vLLM instances
    controller_trainer.py   controller <-> each rank of the trainer
    controller_rewards.py   controller <-> the rewards processes
    weights.py              publisher (trainer, or a site that relays) <-> a site's relay
    operator.py             an operator's commands (`streamrl scale`) <-> controller
    samples.py              how groups, requests and samples become bodies and arrays

A message is a frozen struct. On the wire (`transport/wire.py`) it is an envelope with its kind and its fields, plus one
frame for each array that its class documents. A message that does not fit its type, or that its sender may not send, is
refused with the field's name, acknowledged, and counted as malformed.
"""
