"""The base class of tasks while workers move from celery-singleton to celery-idempotent."""

from celery import Task
from celery_singleton import DuplicateTaskError, Singleton

from celery_idempotent import IdempotentTask


class Locked(Singleton):
    abstract = True
    lock_expiry = 3600  # for locks that no process of the second step releases
    raise_on_duplicate = True  # so that the reservation is released

    def apply_async(self, args=None, kwargs=None, task_id=None, producer=None, **options):
        options |= {"task_id": task_id, "producer": producer}
        if task_id == self.request.id:  # a retry, or a message that is put back: it has the lock
            return Task.apply_async(self, args, kwargs, **options)
        return super().apply_async(args, kwargs, **options)


class TransitionalTask(IdempotentTask, Locked):
    abstract = True
    idempotency_until = "finished"
    idempotency_dedupe_publish = True

    def apply_async(self, *args, **options):
        try:
            return super().apply_async(*args, **options)
        except DuplicateTaskError as duplicate:
            return self.AsyncResult(duplicate.task_id)
