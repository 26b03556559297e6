//! `/props` and `/slots`: what is served and how busy it is, in the form of llama.cpp's server; and
//! `/health`, for balancers.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::app::AppState;
use crate::fields::number;

/// The model, its template, and what holds where a request says nothing.
pub(crate) async fn props(State(app): State<Arc<AppState>>) -> Response {
    let said = app.sampling;
    let params = json!({
        "temperature": number(said.temperature), "top_k": said.top_k, "top_p": number(said.top_p),
        "min_p": number(said.min_p), "repeat_penalty": number(said.repetition_penalty),
        "typical_p": number(said.typical_p), "xtc_probability": number(said.xtc_probability),
        "xtc_threshold": number(said.xtc_threshold), "mirostat": if said.mirostat_tau > 0.0 { 2 } else { 0 },
        "mirostat_tau": number(said.mirostat_tau), "mirostat_eta": number(said.mirostat_eta),
        "dry_multiplier": number(said.dry_multiplier), "dry_base": number(said.dry_base),
        "dry_allowed_length": said.dry_allowed_length,
        "dry_penalty_last_n": if said.dry_window == 0 { json!(-1) } else { json!(said.dry_window) },
    });
    axum::Json(json!({
        "default_generation_settings": { "n_ctx": app.context, "params": params },
        "total_slots": app.slots, "model_alias": app.names[0],
        "chat_template": app.tokenizer.chat_template_source(), "tool_calls": app.format.name(),
        "bos_token": app.tokenizer.bos_token(), "eos_token": app.tokenizer.eos_token(),
        "modalities": { "vision": false, "audio": false },
        "build_info": concat!("fracbit ", env!("CARGO_PKG_VERSION")),
    }))
    .into_response()
}

/// That the server is ready, and its load in texts.
pub(crate) async fn health(State(app): State<Arc<AppState>>) -> Response {
    let (running, waiting) = (app.metrics.running(), app.metrics.waiting());
    let load = json!({ "status": "ok", "slots": app.slots, "running": running, "waiting": waiting });
    axum::Json(load).into_response()
}

/// Each slot, busy or not. Texts have no slot of their own: as many are busy as texts are written.
pub(crate) async fn slots(State(app): State<Arc<AppState>>) -> Response {
    let running = app.metrics.running();
    let slot = |id| json!({ "id": id, "n_ctx": app.context, "is_processing": id < running });
    axum::Json((0..app.slots).map(slot).collect::<Value>()).into_response()
}
