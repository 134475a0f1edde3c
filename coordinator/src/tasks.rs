//! Tasks without which a coordinator must not go on, each with its duty, for the message if it ends.

use std::{collections::HashMap, future};
use tokio::{
    runtime::Handle,
    task::{Id, JoinSet},
};

#[derive(Debug, Default)]
pub struct Tasks {
    running: JoinSet<()>,
    /// The duty of each task, as in "the background task that accepts workers".
    duties: HashMap<Id, &'static str>,
}

impl Tasks {
    /// Starts a task on the loop of `handle`.
    pub fn spawn<T>(&mut self, duty: &'static str, handle: &Handle, task: impl Future<Output = T> + Send + 'static) {
        let running = self.running.spawn_on(
            async move {
                task.await;
            },
            handle,
        );
        self.duties.insert(running.id(), duty);
    }

    /// Waits until a task ends, by itself or by a panic, and returns its duty. Cancel safe.
    pub async fn ended(&mut self) -> &'static str {
        let id = match self.running.join_next_with_id().await {
            Some(Ok((id, ()))) => id,
            Some(Err(error)) => error.id(),
            None => return future::pending().await,
        };
        self.duties.get(&id).copied().unwrap_or_default()
    }

    /// Ends all tasks, and waits until they have let go of what they hold: the next process opens the same files.
    pub async fn stop(mut self) {
        self.running.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_task_that_ends_is_named_also_after_a_panic() {
        let mut tasks = Tasks::default();
        let handle = Handle::current();
        tasks.spawn("waits", &handle, future::pending::<()>());
        tasks.spawn("panics", &handle, async { panic!("on purpose") });
        assert_eq!(tasks.ended().await, "panics");
        tasks.spawn("returns", &handle, future::ready(3));
        assert_eq!(tasks.ended().await, "returns");
        tasks.stop().await;
    }
}
