//! `/props` and `/slots`: what is served and how busy it is, in the form of llama.cpp's server.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use fracbit_model::SampleConfig;
use serde_json::{Value, json};

use crate::app::AppState;
use crate::fields::number;

/// The model, its template, and what holds where a request says nothing.
pub(crate) async fn props(State(app): State<Arc<AppState>>) -> Response {
    let SampleConfig { temperature, top_k, top_p, min_p, repetition_penalty, .. } = app.sampling;
    let more = app.sampling;
    let params = json!({
        "temperature": number(temperature), "top_k": top_k, "top_p": number(top_p), "min_p": number(min_p),
        "repeat_penalty": number(repetition_penalty), "typical_p": number(more.typical_p),
        "xtc_probability": number(more.xtc_probability), "xtc_threshold": number(more.xtc_threshold),
        "mirostat": if more.mirostat_tau > 0.0 { 2 } else { 0 }, "mirostat_tau": number(more.mirostat_tau),
        "mirostat_eta": number(more.mirostat_eta), "dry_multiplier": number(more.dry_multiplier),
        "dry_base": number(more.dry_base), "dry_allowed_length": more.dry_allowed_length,
        "dry_penalty_last_n": if more.dry_window == 0 { json!(-1) } else { json!(more.dry_window) },
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

/// Each slot, busy or not. Texts have no slot of their own: as many are busy as texts are written.
pub(crate) async fn slots(State(app): State<Arc<AppState>>) -> Response {
    let running = app.metrics.running();
    let slot = |id| json!({ "id": id, "n_ctx": app.context, "is_processing": id < running });
    axum::Json((0..app.slots).map(slot).collect::<Value>()).into_response()
}
