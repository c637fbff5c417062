//! gRPC for agents: one stream each, translated into events and back.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use baton_job::{engine::Event, ids::Attachment, message::Report};
use baton_proto::v1::{self, node_service_server::NodeService};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt, wrappers::UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::job::{Handle, Input};

/// The service.
pub(crate) struct Nodes {
    job: Handle,
    welcome: Arc<v1::Welcome>,
    next_attachment: AtomicU64,
}

impl Nodes {
    pub(crate) fn new(job: Handle, welcome: v1::Welcome) -> Self {
        Self { job, welcome: Arc::new(welcome), next_attachment: AtomicU64::new(1) }
    }
}

type Outgoing =
    std::pin::Pin<Box<dyn Stream<Item = Result<v1::CoordinatorMessage, Status>> + Send>>;

#[tonic::async_trait]
impl NodeService for Nodes {
    type AttachStream = Outgoing;

    async fn attach(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut incoming = request.into_inner();
        let first =
            incoming.message().await?.ok_or_else(|| Status::invalid_argument("no hello"))?;
        if let Some(v1::agent_message::Message::Hello(hello)) = &first.message {
            baton_proto::check_version(hello)
                .map_err(|error| Status::failed_precondition(error.to_string()))?;
        }
        let Report::Hello(hello) = Report::try_from(first)? else {
            return Err(Status::invalid_argument("the first message must be hello"));
        };
        let attachment = Attachment(self.next_attachment.fetch_add(1, Ordering::Relaxed));
        let node = hello.node.clone();
        let (outbox, directives) = mpsc::unbounded_channel();
        self.queue(Input::Opened { attachment, outbox })?;
        self.queue(Event::Attached { attachment, hello }.into())?;

        let job = self.job.clone();
        tokio::spawn(async move {
            while let Some(Ok(message)) = incoming.next().await {
                match Report::try_from(message) {
                    Ok(report) => {
                        let node = node.clone();
                        job.send(Event::Reported { node, attachment, report }.into());
                    }
                    Err(error) => {
                        tracing::warn!(%node, %error, "malformed message");
                        break;
                    }
                }
            }
            job.send(Event::Detached { node, attachment }.into());
        });

        let welcome = v1::CoordinatorMessage {
            message: Some(v1::coordinator_message::Message::Welcome((*self.welcome).clone())),
        };
        let directives =
            UnboundedReceiverStream::new(directives).map(|directive| match directive {
                Ok(directive) => Ok(directive.into()),
                Err(reason) => Err(Status::failed_precondition(reason)),
            });
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(welcome)).chain(directives))))
    }
}

impl Nodes {
    fn queue(&self, input: Input) -> Result<(), Status> {
        if self.job.send(input) { Ok(()) } else { Err(Status::unavailable("shutting down")) }
    }
}
