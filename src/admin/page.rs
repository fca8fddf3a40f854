//! The page that operators look at: one file, built into the program. It loads nothing from anywhere else, and may not.

use std::sync::LazyLock;

use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};

const PAGE: &str = include_str!("page.html");

/// Names the page's own script and style by their hashes: what else gets into the page does nothing.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash("script"),
        hash("style")
    )
});

pub(super) async fn answer() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

/// Of the text between `<tag>` and `</tag>`, as Content Security Policy level 2 wants it.
fn hash(tag: &str) -> String {
    format!("sha256-{}", STANDARD.encode(digest(&SHA256, inside(tag).as_bytes())))
}

fn inside(tag: &str) -> &'static str {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    PAGE.split_once(open.as_str()).and_then(|(_, rest)| rest.split_once(close.as_str())).map_or("", |(inside, _)| inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_needs_nothing_but_itself() {
        for tag in ["script", "style"] {
            assert!(!inside(tag).is_empty(), "{tag}");
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "one {tag} only");
        }
        // A name space is no address.
        let addresses = PAGE.replace("http://www.w3.org/2000/svg", "");
        for outside in ["http://", "https://", "src=", "@import", "url(", "innerHTML", "eval(", " style=", "onclick"] {
            assert!(!addresses.contains(outside), "{outside} is in the page");
        }
    }
}
