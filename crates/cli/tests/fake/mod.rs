//! A fake coordinator that serves a state set by a test or an example.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
};

use baton_proto::v1::{
    DrainRequest, DrainResponse, GetRecipeRequest, GetRecipeResponse, GetStatusRequest,
    GetStatusResponse, ListCheckpointsRequest, ListCheckpointsResponse, PauseRequest,
    PauseResponse, RecordProfileRequest, RecordProfileResponse, ResumeRequest, ResumeResponse,
    StopRequest, StopResponse, StreamLogsRequest, StreamLogsResponse, StreamMetricsRequest,
    StreamMetricsResponse, SubmitJobRequest, SubmitJobResponse, TriggerCheckpointRequest,
    TriggerCheckpointResponse, WatchEventsRequest, WatchEventsResponse,
    job_service_server::{JobService, JobServiceServer},
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{mpsc, watch},
};
use tokio_stream::{Stream, wrappers::ReceiverStream, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, transport::Server};

/// What a fake coordinator serves, and the requests that it has received.
#[derive(Default)]
pub(crate) struct FakeState {
    pub(crate) status: GetStatusResponse,
    pub(crate) events: Vec<WatchEventsResponse>,
    pub(crate) points: Vec<StreamMetricsResponse>,
    pub(crate) lines: Vec<StreamLogsResponse>,
    pub(crate) recipe: GetRecipeResponse,
    /// Parts of a profile, in pieces.
    pub(crate) profile: Vec<RecordProfileResponse>,
    /// Error for requests of the status.
    pub(crate) status_refusal: Option<Status>,
    /// Error for requests that would change the job.
    pub(crate) refusal: Option<Status>,
    /// Requests that would change the job.
    pub(crate) requests: Vec<String>,
}

/// A fake coordinator; it stops when it is dropped.
pub(crate) struct FakeCoordinator {
    state: SharedState,
    address: SocketAddr,
    _runtime: Runtime,
}

/// The state, shared with the server's tasks.
#[derive(Clone)]
struct SharedState {
    state: Arc<Mutex<FakeState>>,
    changed: watch::Sender<()>,
}

impl FakeCoordinator {
    /// Starts on a free port.
    pub(crate) fn start(state: FakeState) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), state)
    }

    /// Starts at an address, for instance that of a coordinator that has stopped.
    pub(crate) fn start_at(address: SocketAddr, state: FakeState) -> Self {
        let threads = &mut tokio::runtime::Builder::new_multi_thread();
        let runtime = threads.worker_threads(1).enable_all().build().unwrap();
        let state =
            SharedState { state: Arc::new(Mutex::new(state)), changed: watch::Sender::new(()) };
        let listener = runtime.block_on(TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let service = JobServiceServer::new(state.clone());
        let incoming = TcpListenerStream::new(listener);
        runtime.spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        Self { state, address, _runtime: runtime }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the state, and sends the change to all followers.
    pub(crate) fn update(&self, change: impl FnOnce(&mut FakeState)) {
        change(&mut self.state.lock());
        self.state.changed.send_replace(());
    }

    /// The requests received so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state.lock().requests.clone()
    }
}

type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl SharedState {
    fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap()
    }

    fn record(&self, request: String) -> Result<(), Status> {
        let mut state = self.lock();
        state.requests.push(request);
        state.refusal.clone().map_or(Ok(()), Err)
    }

    /// Items of a list from index `first`, and with `follow` also new ones.
    fn items<T: Clone + Send + Sync + 'static>(
        &self,
        mut first: usize,
        follow: bool,
        list: impl Fn(&FakeState) -> &Vec<T> + Send + Sync + 'static,
        filter: impl Fn(&T) -> bool + Send + Sync + 'static,
    ) -> Response<Items<T>> {
        let (sender, items) = mpsc::channel(16);
        let shared = self.clone();
        tokio::spawn(async move {
            let mut changed = shared.changed.subscribe();
            loop {
                let new: Vec<T> = list(&shared.lock()).get(first..).unwrap_or_default().to_vec();
                first += new.len();
                for item in new.into_iter().filter(&filter) {
                    if sender.send(Ok(item)).await.is_err() {
                        return;
                    }
                }
                if !follow || changed.changed().await.is_err() {
                    return;
                }
            }
        });
        Response::new(Box::pin(ReceiverStream::new(items)))
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl JobService for SharedState {
    type WatchEventsStream = Items<WatchEventsResponse>;
    type StreamMetricsStream = Items<StreamMetricsResponse>;
    type StreamLogsStream = Items<StreamLogsResponse>;
    type RecordProfileStream = Items<RecordProfileResponse>;

    async fn get_status(&self, _: Request<GetStatusRequest>) -> Answer<GetStatusResponse> {
        let state = self.lock();
        match &state.status_refusal {
            Some(refusal) => Err(refusal.clone()),
            None => Ok(Response::new(state.status.clone())),
        }
    }

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Answer<Self::WatchEventsStream> {
        let WatchEventsRequest { after_id, past_only } = request.into_inner();
        Ok(self.items(0, !past_only, |state| &state.events, move |event| event.id > after_id))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Answer<DrainResponse> {
        self.record(format!("drain: {}", request.into_inner().reason))?;
        Ok(Response::new(DrainResponse {}))
    }

    async fn trigger_checkpoint(
        &self,
        _: Request<TriggerCheckpointRequest>,
    ) -> Answer<TriggerCheckpointResponse> {
        self.record("checkpoint".to_owned())?;
        Ok(Response::new(TriggerCheckpointResponse {}))
    }

    async fn stop(&self, _: Request<StopRequest>) -> Answer<StopResponse> {
        self.record("stop".to_owned())?;
        Ok(Response::new(StopResponse {}))
    }

    async fn pause(&self, request: Request<PauseRequest>) -> Answer<PauseResponse> {
        self.record(format!("pause: {}", request.into_inner().reason))?;
        Ok(Response::new(PauseResponse {}))
    }

    async fn resume(&self, _: Request<ResumeRequest>) -> Answer<ResumeResponse> {
        self.record("resume".to_owned())?;
        Ok(Response::new(ResumeResponse {}))
    }

    async fn list_checkpoints(
        &self,
        _: Request<ListCheckpointsRequest>,
    ) -> Answer<ListCheckpointsResponse> {
        Ok(Response::new(ListCheckpointsResponse::default()))
    }

    async fn stream_metrics(
        &self,
        request: Request<StreamMetricsRequest>,
    ) -> Answer<Self::StreamMetricsStream> {
        let StreamMetricsRequest { after_unix_millis, follow } = request.into_inner();
        let is_later = move |point: &StreamMetricsResponse| point.unix_millis > after_unix_millis;
        Ok(self.items(0, follow, |state| &state.points, is_later))
    }

    async fn stream_logs(
        &self,
        request: Request<StreamLogsRequest>,
    ) -> Answer<Self::StreamLogsStream> {
        let StreamLogsRequest { ranks, all_sources, tail, follow } = request.into_inner();
        let is_requested = move |line: &StreamLogsResponse| match line.rank {
            Some(rank) => ranks.is_empty() || ranks.contains(&rank),
            None => all_sources,
        };
        let first = match tail {
            0 => 0,
            // The last `tail` matching lines.
            tail => {
                let lines = &self.lock().lines;
                let matching =
                    (0..lines.len()).rev().filter(|&number| is_requested(&lines[number]));
                matching.take(tail as usize).last().unwrap_or(lines.len())
            }
        };
        Ok(self.items(first, follow, |state| &state.lines, is_requested))
    }

    async fn get_recipe(&self, _: Request<GetRecipeRequest>) -> Answer<GetRecipeResponse> {
        Ok(Response::new(self.lock().recipe.clone()))
    }

    async fn record_profile(
        &self,
        request: Request<RecordProfileRequest>,
    ) -> Answer<Items<RecordProfileResponse>> {
        self.record(format!("profile of {} steps", request.into_inner().steps))?;
        Ok(self.items(0, false, |state| &state.profile, |_| true))
    }

    async fn submit_job(&self, request: Request<SubmitJobRequest>) -> Answer<SubmitJobResponse> {
        let SubmitJobRequest { recipe, overrides } = request.into_inner();
        self.record(format!("submit {overrides:?}: {recipe}"))?;
        Ok(Response::new(SubmitJobResponse { job_id: "5f0c8d5e".into(), name: "demo".into() }))
    }
}
