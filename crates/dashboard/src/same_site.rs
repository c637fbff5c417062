//! Checks whether a request comes from the dashboard's own page, by headers that browsers set.

use std::net::IpAddr;

use axum::{
    extract::Request,
    http::{
        HeaderMap, Uri,
        header::{CONTENT_TYPE, HOST, ORIGIN},
        uri::Authority,
    },
    middleware::Next,
    response::{IntoResponse, Response},
};

use crate::refusal::Refusal;

/// A form cannot set this header, and a script of another site only if this server allows it, which it never does.
const OWN_HEADER: &str = "x-baton-request";
const FETCH_SITE: &str = "sec-fetch-site";

/// Refuses a control request that a page of another site made the browser send.
pub(crate) fn check(uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    if text(OWN_HEADER) != Some("1") {
        return Err(Refusal::forbidden(
            "a request to control the job needs the header x-baton-request: 1",
        ));
    }
    let kind = text(CONTENT_TYPE.as_str()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(Refusal::forbidden(
            "a request to control the job needs the header content-type: application/json",
        ));
    }
    if text(FETCH_SITE).is_some_and(|site| site != "same-origin" && site != "none") {
        return Err(Refusal::forbidden("a page of another site must not control the job"));
    }
    match text(ORIGIN.as_str()) {
        Some(origin) if !is_own(origin, host_of(uri, headers).as_ref()) => {
            Err(Refusal::forbidden("a page of another origin must not control the job"))
        }
        _ => Ok(()),
    }
}

/// Whether a page of `origin` was served by this server, which the browser addresses as `host`.
fn is_own(origin: &str, host: Option<&Authority>) -> bool {
    let (Ok(origin), Some(host)) = (origin.parse::<Uri>(), host) else { return false };
    let default_port = match origin.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        _ => return false,
    };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(default_port);
    origin
        .authority()
        .is_some_and(|own| own.host().eq_ignore_ascii_case(host.host()) && port(own) == port(host))
}

/// The host in the request: in HTTP/2 it is in the URI, in HTTP/1 in a header.
fn host_of(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    let from_header = || headers.get(HOST)?.to_str().ok()?.parse().ok();
    uri.authority().cloned().or_else(from_header)
}

/// Passes on requests about the job only if their host is an IP address or localhost.
pub(crate) async fn only_by_address(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_about_job = path.starts_with("/api/") || path == "/metrics";
    let host = host_of(request.uri(), request.headers());
    if is_about_job && !host.as_ref().is_some_and(is_address) {
        return Refusal::forbidden(
            "a coordinator without tokens can be opened only by IP address or as localhost, because another web page \
             could use a host name to reach it: open it by its address, or start it with --tokens",
        )
        .into_response();
    }
    next.run(request).await
}

fn is_address(authority: &Authority) -> bool {
    let host = authority.host();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(headers: &[(&'static str, &'static str)]) -> Result<(), Refusal> {
        let mut all = HeaderMap::new();
        for (name, value) in headers {
            all.insert(*name, value.parse().unwrap());
        }
        check(&Uri::from_static("/api/control/drain"), &all)
    }

    const OWN: [(&str, &str); 3] = [
        ("x-baton-request", "1"),
        ("content-type", "application/json; charset=utf-8"),
        ("host", "gpu.example:29600"),
    ];

    fn own_and(more: &[(&'static str, &'static str)]) -> Result<(), Refusal> {
        checked(&[&OWN, more].concat())
    }

    #[test]
    fn a_tool_and_our_own_page_may_control_the_job() {
        for more in [
            &[][..],
            &[("origin", "http://gpu.example:29600"), ("sec-fetch-site", "same-origin")],
            &[("origin", "https://GPU.example:29600")],
            &[("sec-fetch-site", "none")],
        ] {
            assert_eq!(own_and(more), Ok(()), "{more:?}");
        }
    }

    #[test]
    fn a_default_port_may_be_omitted() {
        let host = |text: &str| text.parse::<Authority>().unwrap();
        assert!(is_own("https://gpu.example", Some(&host("gpu.example:443"))));
        assert!(is_own("http://gpu.example:80", Some(&host("gpu.example"))));
        assert!(!is_own("http://gpu.example", Some(&host("gpu.example:443"))));
    }

    #[test]
    fn other_sites_may_not_control_the_job() {
        for more in [
            ("origin", "http://evil.example:29600"),
            ("origin", "http://gpu.example:8080"),
            ("origin", "http://gpu.example:29600.evil.example"),
            ("origin", "http://gpu.example:29600@evil.example"),
            ("origin", "null"),
            ("origin", ""),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
            ("sec-fetch-site", ""),
            ("content-type", "text/plain"),
            ("content-type", "application/jsonp"),
            ("x-baton-request", "0"),
        ] {
            assert!(own_and(&[more]).is_err(), "{more:?}");
        }
        for without in ["x-baton-request", "content-type"] {
            let rest: Vec<_> = OWN.into_iter().filter(|(name, _)| *name != without).collect();
            assert!(checked(&rest).is_err(), "{without}");
        }
    }

    #[test]
    fn an_origin_is_refused_if_the_request_has_no_host() {
        assert!(checked(&[OWN[0], OWN[1], ("origin", "http://gpu.example:29600")]).is_err());
    }

    #[test]
    fn host_names_are_distinguished_from_addresses() {
        for (host, expected) in [
            ("127.0.0.1:29600", true),
            ("[::1]:29600", true),
            ("localhost", true),
            ("10.0.0.7", true),
            ("evil.example:29600", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
        ] {
            assert_eq!(is_address(&host.parse().unwrap()), expected, "{host}");
        }
    }
}
