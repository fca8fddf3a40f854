//! The edge: HTTP in, HTTP out.

pub mod api;
mod connection;
pub mod server;
pub mod stream;
pub mod upstream;
