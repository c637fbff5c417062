//! The page and its scripts, style and icon, built into the program.

use axum::{
    Router,
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH},
    },
    response::{IntoResponse, Response},
    routing::get,
};

/// Content security policy: only files of this server; no framing of the page, and no forms.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

struct Asset {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

macro_rules! asset {
    ($path:literal, $content_type:ident, $file:literal) => {
        Asset {
            path: $path,
            content_type: $content_type,
            text: include_str!(concat!("../assets/", $file)),
        }
    };
}

const ASSETS: [Asset; 11] = [
    asset!("/", HTML, "index.html"),
    asset!("/favicon.svg", IMAGE, "favicon.svg"),
    asset!("/assets/style.css", STYLE, "style.css"),
    asset!("/assets/app.js", SCRIPT, "app.js"),
    asset!("/assets/chart.js", SCRIPT, "chart.js"),
    asset!("/assets/curves.js", SCRIPT, "curves.js"),
    asset!("/assets/feed.js", SCRIPT, "feed.js"),
    asset!("/assets/format.js", SCRIPT, "format.js"),
    asset!("/assets/history.js", SCRIPT, "history.js"),
    asset!("/assets/page.js", SCRIPT, "page.js"),
    asset!("/assets/panels.js", SCRIPT, "panels.js"),
];

/// A route for each file.
pub(crate) fn router() -> Router {
    ASSETS.iter().fold(Router::new(), |router, asset| {
        let tag = format!("\"{}\"", &blake3::hash(asset.text.as_bytes()).to_hex()[..16]);
        router.route(
            asset.path,
            get(move |headers: HeaderMap| async move { asset.response(&tag, &headers) }),
        )
    })
}

impl Asset {
    /// The file, or 304 if the browser has it. The browser asks every time, so it shows the page of a new coordinator.
    fn response(&self, tag: &str, request: &HeaderMap) -> Response {
        let known = request.get(IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
        let is_known = known.is_some_and(|tags| {
            tags.split(',').any(|known| known.trim().trim_start_matches("W/") == tag)
        });
        let mut response = match is_known {
            true => StatusCode::NOT_MODIFIED.into_response(),
            false => ([(CONTENT_TYPE, self.content_type)], self.text).into_response(),
        };
        let headers = response.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        if let Ok(tag) = HeaderValue::from_str(tag) {
            headers.insert(ETAG, tag);
        }
        response
    }
}
