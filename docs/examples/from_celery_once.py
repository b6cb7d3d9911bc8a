"""The base class of tasks while workers move from celery-once to celery-idempotent."""

from celery import Task
from celery_once import QueueOnce

from celery_idempotent import IdempotentTask


class Locked(QueueOnce):
    abstract = True

    def apply_async(self, args=None, kwargs=None, task_id=None, producer=None, **options):
        options |= {"task_id": task_id, "producer": producer}
        if task_id == self.request.id:  # a retry, or a message that is put back: it has the lock
            return Task.apply_async(self, args, kwargs, **options)
        return super().apply_async(args, kwargs, **options)

    def before_start(self, task_id, args, kwargs):
        if self.unlock_before_run():
            self.once_backend.clear_lock(self.get_key(args, kwargs))
        super().before_start(task_id, args, kwargs)


class TransitionalTask(IdempotentTask, Locked):
    abstract = True
    __call__ = IdempotentTask.__call__
    idempotency_until = "finished"  # "started" for a task with unlock_before_run
    idempotency_dedupe_publish = True
