//! A place in a queue.

use tokio::sync::{mpsc, oneshot};

use super::{Message, Permit, tell};
use crate::scheduler::{Event, Outlook, Reason, RequestId};

/// Why a ticket was turned away, and in how many seconds it is worth trying again (at least 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Why.
    pub reason: Reason,
    /// Seconds.
    pub retry_after: u32,
}

/// A place in a queue: wait for [`Ticket::granted`], drop it to leave.
#[derive(Debug)]
pub struct Ticket {
    id: RequestId,
    answer: oneshot::Receiver<Result<Permit, Rejection>>,
    settled: bool,
    messages: mpsc::UnboundedSender<Message>,
}

/// Asks when it is a ticket's turn.
#[derive(Clone, Debug)]
pub struct Asker {
    id: RequestId,
    messages: mpsc::UnboundedSender<Message>,
}

impl Asker {
    /// The answer is `None` once it does not wait any more; an error if the pool has ended.
    pub fn ask(&self) -> oneshot::Receiver<Option<Outlook>> {
        let (reply, answer) = oneshot::channel();
        // A failed send drops the reply, which is the answer.
        let _ = self.messages.send(Message::Outlook { id: self.id, reply });
        answer
    }
}

impl Ticket {
    pub(super) fn new(id: RequestId, answer: oneshot::Receiver<Result<Permit, Rejection>>, messages: mpsc::UnboundedSender<Message>) -> Self {
        Ticket { id, answer, settled: false, messages }
    }

    /// The id under which the pool knows this stay in the queue.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Asks about this stay for as long as anybody wants to know, beside whoever waits for its end.
    pub fn asker(&self) -> Asker {
        Asker { id: self.id, messages: self.messages.clone() }
    }

    /// Waits for the turn. Dropping the future loses nothing; dropping the ticket leaves the queue. Answers once.
    pub async fn granted(&mut self) -> Result<Permit, Rejection> {
        let answer = (&mut self.answer).await;
        self.settled = true;
        // The sender is dropped unanswered only when the owner task has ended with its runtime.
        answer.unwrap_or(Err(Rejection { reason: Reason::Draining, retry_after: 1 }))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A permit that has already been sent is dropped with `answer` and settles by itself; the scheduler ignores the cancel then.
        if !self.settled {
            tell(&self.messages, Event::Cancelled(self.id));
        }
    }
}
