//! Exports OpenTelemetry traces of the job.
//!
//! A thread of the SDK sends them. Traces that the collector does not accept are lost; training never waits.

mod timeline;

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use baton_job::{Time, engine::Record};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{
    ExporterBuildError, WithExportConfig, WithTonicConfig, tonic_types::transport::ClientTlsConfig,
};
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    trace::{BatchSpanProcessor, SpanData, SpanExporter, SpanProcessor},
};
pub(crate) use timeline::Timeline;
use tracing::{info, warn};

use crate::journal::LoggedEvent;

/// Longest wait for the collector at the end of a job.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Builds the spans of a job and sends them to a collector.
#[derive(Debug)]
pub(crate) struct Traces {
    timeline: Timeline,
    processor: BatchSpanProcessor,
}

impl Traces {
    /// Sends the spans of `timeline` to an OTLP collector over gRPC. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// `endpoint` is not a valid address. The collector need not be running.
    pub(crate) fn to(endpoint: &str, timeline: Timeline) -> Result<Self, ExporterBuildError> {
        let exporter =
            opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(endpoint);
        // Load root certificates only for https: a machine may have none.
        let exporter = match endpoint.starts_with("https:") {
            true => exporter.with_tls_config(ClientTlsConfig::new().with_enabled_roots()),
            false => exporter,
        };
        let exporter = exporter.build()?;
        let exporter = LoggingExporter {
            exporter,
            endpoint: endpoint.to_owned(),
            is_failing: AtomicBool::new(false),
        };
        let mut processor = BatchSpanProcessor::builder(exporter).build();
        // The variables `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` take precedence.
        let attributes = [
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("baton.job.id", timeline.job().to_string()),
        ];
        let resource = Resource::builder().with_attributes(attributes);
        let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
            Some(_) => resource,
            None => resource.with_service_name("baton"),
        };
        processor.set_resource(&resource.build());
        info!(endpoint, trace_id = %timeline.trace_id(), "exporting traces");
        Ok(Self { timeline, processor })
    }

    /// Adds a record of the engine, and exports the spans that end with it.
    pub(crate) fn record(&mut self, now: Time, record: &Record) {
        for span in self.timeline.record(now, record) {
            self.processor.on_end(span);
        }
    }

    /// Adds a job event.
    pub(crate) fn event(&mut self, event: &LoggedEvent) {
        self.timeline.event(event);
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        // The exporter has logged all other errors.
        if let Err(OTelSdkError::Timeout(after)) =
            self.processor.shutdown_with_timeout(SHUTDOWN_TIMEOUT)
        {
            warn!(
                "--otlp-endpoint: the last traces are lost: the collector did not accept them within {after:?}"
            );
        }
    }
}

/// An exporter that logs when the collector begins to fail, and when it works again.
struct LoggingExporter {
    exporter: opentelemetry_otlp::SpanExporter,
    endpoint: String,
    is_failing: AtomicBool,
}

impl SpanExporter for LoggingExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
        let endpoint = &self.endpoint;
        match (&result, self.is_failing.swap(result.is_err(), Ordering::Relaxed)) {
            (Err(error), false) => warn!(
                "--otlp-endpoint {endpoint}: traces are lost until it accepts them: {error}; is it a collector \
                 for gRPC (port 4317, not 4318)?"
            ),
            (Ok(()), true) => info!("--otlp-endpoint {endpoint}: traces are accepted again"),
            (Err(_), true) | (Ok(()), false) => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl fmt::Debug for LoggingExporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoggingExporter").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}
