//! The job that this coordinator serves, and waiting until there is one.

use std::sync::Arc;

use baton_checkpoint::Store;
use baton_job::JobId;
use baton_recipe::JobSpec;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Status;

use crate::{
    job::{JobHandle, JobInput},
    metrics::JobMetrics,
};

/// A job being served.
pub(crate) struct ServedJob {
    pub(crate) job: JobHandle,
    pub(crate) job_id: JobId,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) store_location: String,
    pub(crate) metrics: Arc<JobMetrics>,
}

impl ServedJob {
    /// Queues an input for the job's loop.
    pub(crate) fn queue(&self, input: JobInput) -> Result<(), Status> {
        if self.job.send(input) { Ok(()) } else { Err(shutting_down()) }
    }

    /// Calls the checkpoint store on a thread for blocking calls.
    pub(crate) async fn in_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, baton_checkpoint::Error> + Send + 'static,
    ) -> Result<T, Status> {
        let location = self.store_location.clone();
        tokio::task::spawn_blocking(move || work(&Store::open_existing(&location)?))
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::unavailable(error.to_string()))
    }

    /// Queues an input that has an answer, and waits for the answer.
    pub(crate) async fn ask<T>(
        &self,
        input: impl FnOnce(oneshot::Sender<T>) -> JobInput,
    ) -> Result<T, Status> {
        let (sender, answer) = oneshot::channel();
        self.queue(input(sender))?;
        answer.await.map_err(|_| shutting_down())
    }
}

/// A submitted job, and the channel for the result.
pub(crate) struct Submission {
    /// The recipe as TOML, and parsed.
    pub(crate) recipe: String,
    pub(crate) spec: JobSpec,
    pub(crate) answer: oneshot::Sender<Result<Arc<ServedJob>, Status>>,
}

/// Holds the job once there is one. Cheap to clone: all clones refer to the same job.
#[derive(Clone)]
pub(crate) struct CurrentJob {
    served: watch::Receiver<Option<Arc<ServedJob>>>,
    submissions: mpsc::Sender<Submission>,
}

/// Sets the [`CurrentJob`] and receives submissions.
pub(crate) struct CurrentJobWriter {
    pub(crate) served: watch::Sender<Option<Arc<ServedJob>>>,
    pub(crate) submissions: mpsc::Receiver<Submission>,
}

impl CurrentJob {
    /// No job yet, and the writer that sets it.
    pub(crate) fn empty() -> (Self, CurrentJobWriter) {
        let (sender, served) = watch::channel(None);
        // Submissions are handled one at a time; a second one finds a job.
        let (submissions, received) = mpsc::channel(1);
        (Self { served, submissions }, CurrentJobWriter { served: sender, submissions: received })
    }

    /// The job, if there is one.
    pub(crate) fn get(&self) -> Option<Arc<ServedJob>> {
        self.served.borrow().clone()
    }

    /// The job; FAILED_PRECONDITION while there is none.
    pub(crate) fn job(&self) -> Result<Arc<ServedJob>, Status> {
        let none = "there is no job yet: submit one with `baton submit RECIPE`";
        self.get().ok_or_else(|| Status::failed_precondition(none))
    }

    /// The job, as soon as there is one.
    pub(crate) async fn wait(&self) -> Result<Arc<ServedJob>, Status> {
        let mut served = self.served.clone();
        let job = served.wait_for(Option::is_some).await.map_err(|_| shutting_down())?;
        job.clone().ok_or_else(shutting_down)
    }

    /// Submits a job, and waits until it has started or is refused.
    pub(crate) async fn submit(
        &self,
        recipe: String,
        spec: JobSpec,
    ) -> Result<Arc<ServedJob>, Status> {
        let (answer, answered) = oneshot::channel();
        // The receiver is dropped once there is a job.
        let sent = self.submissions.send(Submission { recipe, spec, answer }).await;
        let answer = if sent.is_ok() { answered.await.ok() } else { None };
        answer.unwrap_or_else(|| Err(self.refusal()))
    }

    fn refusal(&self) -> Status {
        match self.get() {
            Some(served) => Status::failed_precondition(format!(
                "this coordinator already serves {}: start another coordinator for another job",
                served.spec.name
            )),
            None => shutting_down(),
        }
    }
}

pub(crate) fn shutting_down() -> Status {
    Status::unavailable("shutting down")
}
