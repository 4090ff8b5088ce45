"""What this worker says of itself: the answer of `GET /worker` and the announce file."""

from __future__ import annotations

from fleet_contract import names
from fleet_contract.worker import Ports, WorkerRecord
from fleet_runtime.config import RuntimeConfig
from fleet_runtime.messages import SchedulerInfo


def worker_record(config: RuntimeConfig, info: SchedulerInfo, scheduler_incarnation: str) -> WorkerRecord:
    """The record, from what is configured and what the scheduler found out."""
    flags = config.flags()
    who = config.identity
    return WorkerRecord(
        pod_uid=who.pod_uid,
        incarnation=scheduler_incarnation,
        namespace=who.namespace,
        service=who.service,
        role=flags.role,
        revision=flags.revision,
        model_revision=config.model_revision,
        served_names=list(config.served_names),
        page_size=names.PAGE_SIZE,
        kv_capacity_tokens=info.kv_capacity_tokens,
        max_rows=info.max_rows,
        context_length=flags.context_length,
        transfer_backends=list(info.transfer_backends),
        ports=Ports(
            data=config.data_port,
            internal=config.internal_port,
            bootstrap=info.bootstrap_port,
            transfer=info.transfer_port,
            events=info.events_port,
            replay=info.replay_port,
            load=info.load_port,
        ),
        profile=info.profile,
    )
